"""Several machines as one: where ranks go, and how Ray starts them there.

Ray is an extra (``pip install 'pippin[cluster]'``): only ``ray_api`` imports it.
"""
