"""Publishers: how the weights of a version reach the engines."""
