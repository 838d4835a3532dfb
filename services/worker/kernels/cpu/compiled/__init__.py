"""Code that numba compiles. The modules beside this package call it."""
