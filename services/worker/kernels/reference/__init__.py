"""Every operation in plain torch and NumPy: readable, slow, run eagerly. `--kernels reference` serves with it.

Products are torch's own, so a row's bits may depend on the rows beside it: the same tokens up to sums that are made in
another order, not to the bit.
"""
