"""Starting jobs: the command `evenhand`, an entry for containers, sweeps, and Kubernetes manifests."""
