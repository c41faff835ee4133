"""One process of a job: a request to stop, its exit status, its log, and what to tell the user."""
