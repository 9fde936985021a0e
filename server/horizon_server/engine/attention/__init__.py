"""Attention that needs no mask: it reads where the documents of a row end from a short tensor.

`function` is what the layers of transformers call, `kernels` computes it (with fused kernels where there are some, with
`blocks` otherwise), `trial` finds out for which models it computes what the model means.
"""
