"""The layer users hold, and everything between a checkpoint and it: rules, recipe, loading, pushing, report."""
