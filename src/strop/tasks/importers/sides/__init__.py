"""Scripts that run where another package is installed, never in our process. Standard library and that package only."""
