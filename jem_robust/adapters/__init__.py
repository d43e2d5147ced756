"""Adapters for ART, Foolbox, torchattacks and AutoAttack: the only modules that import them."""
