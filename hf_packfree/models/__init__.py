"""Patched classes of transformers' models, each a subclass that adds the packed branch: the files
of families, and the mixins that families share.
"""
