"""The CUDA driver: asked what there is (`probe`), and told to load and launch (`cuda`)."""
