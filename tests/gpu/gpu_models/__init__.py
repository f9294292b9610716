"""Models of the GPU tests, each for one thing that a GPU does otherwise than a CPU."""
