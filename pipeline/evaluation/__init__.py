"""How good a model is: accuracy by class and group, and how well wrong labels are found."""
