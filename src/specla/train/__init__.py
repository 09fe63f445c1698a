# SPDX-License-Identifier: Apache-2.0
"""Training of the demo model: text sources, problem generators, a differentiable GDN, the recipe.

One command trains it (`python -m specla.train.pretrain`), one scores it (`specla.train.evaluate`),
one writes its model card (`specla.train.card`). Nothing here is needed to run a checkpoint.
"""
