"""The kernels of latent_attention."""
