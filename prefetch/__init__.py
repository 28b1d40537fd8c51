"""What to bring next: the schedule of a pass, the expert cache, predictors, and traces of routers."""
