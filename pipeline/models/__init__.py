"""Networks: backbone, linear head, projector to the unit sphere, average of the weights."""
