"""What people look at: the live terminal view, the HTML report, the results page."""
