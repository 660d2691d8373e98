"""Studies without a cluster: the simulator and the demo."""
