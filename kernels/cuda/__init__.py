"""CUDA kernels: sources, prebuilt images, and what loads and launches them.

Nothing here needs a GPU or a driver to be imported; the first use does.
"""
