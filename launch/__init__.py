"""Starting jobs: an entry with honest exit codes, and what a cluster needs around it."""
