"""Reports: tables of runs, figures, the label audit and its page."""
