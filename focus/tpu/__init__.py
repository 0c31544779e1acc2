"""TPU slices that are not there: ahead-of-time compilation, rooflines, and planning of a run."""
