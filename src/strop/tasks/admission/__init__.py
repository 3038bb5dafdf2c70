"""The gate of repository tasks, the scan for leaks, the pool on disk, and the resumable build that ties them together."""
