"""The label audit: findings, shares of wrong labels, tables, the page, corrections."""
