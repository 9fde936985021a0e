"""Attention that needs no mask: it reads where the documents of a row end from a short tensor.

`function` is what the layers of transformers call, `kernels` computes it (with fused kernels where there are some, with
`blocks` otherwise), `trial` finds out for which models it computes what the model means.

In all modules, the same name means the same:

* `query`, `key`, `value`: [1, heads, tokens, E], in `blocks` and `host_kernel` without the 1. Several heads of queries
  may share one of keys and values, and E of values may be another one.
* `output` and its `gradient`: [1, T, heads, E], again without the 1 there. `logsumexp` [heads, T] in fp32: of each
  query, the logarithm of the sum of the exponentials of its scores and its sink. In backward these three may be over
  more keys than are given: what is found are the parts of the gradients that the given keys have.
* `boundaries`: where the documents of a row start, and the end of the last one, as integers on the CPU; `ends` is the
  same as a list. `key_boundaries` are those of the keys, where documents have earlier ones besides those of the row.
* `rule`: scale, window and soft cap (`blocks.Scores`). `sinks`: one score per head to which no value belongs; empty
  where there are none.
* `is_causal`: a query sees no key after its own, which for the last query of a document is the last key. Otherwise it
  sees all keys of its document. `ahead`: how many tokens the first query comes after the first key.
"""
