"""Build and link the environments that Ziggurat is developed and tested in."""
