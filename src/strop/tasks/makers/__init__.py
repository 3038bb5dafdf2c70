"""Ways to make tasks from a repository whose suite runs: mutation, feature deletion, commit history. Each yields drafts for the gate."""
