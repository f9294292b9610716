"""Model sources of the example manifests: one module a manifest, each with a `build` that returns an nn.Module."""
