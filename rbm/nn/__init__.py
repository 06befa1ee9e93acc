"""Layers, students and losses. Usable without the rest of the package.

- Layers: :mod:`rbm.nn.rbm_layer` and :mod:`rbm.nn.feed_forward`, both on :mod:`rbm.nn.memory_router`;
  :mod:`rbm.nn.moe`, the mixture with a learned router; :mod:`rbm.nn.reference`, the paper's equations in eager PyTorch.
- Students: :mod:`rbm.nn.students`, :mod:`rbm.nn.tined`, :mod:`rbm.nn.simmlp`, :mod:`rbm.nn.trees`; saved and loaded by
  :mod:`rbm.nn.saved_student`, :mod:`rbm.nn.pretrained` (Hugging Face Hub), :mod:`rbm.nn.model_card` and
  :mod:`rbm.nn.original_checkpoint` (the paper's released code).
- Training: :mod:`rbm.nn.losses`, :mod:`rbm.nn.kmeans_init`, :mod:`rbm.nn.dead_experts`, :mod:`rbm.nn.parameters`,
  :mod:`rbm.nn.dropout`, :mod:`rbm.nn.reconstruction`, :mod:`rbm.nn.repeated_forward` (activation checkpointing).
- Rows: :mod:`rbm.nn.sparse_rows`, :mod:`rbm.nn.half_rows`.
- Inference: :mod:`rbm.nn.folded_weights`, :mod:`rbm.nn.packed_student`, :mod:`rbm.nn.int8`,
  :mod:`rbm.nn.first_layer` (evaluations during training).
- Observing: :mod:`rbm.nn.routing_record`, :mod:`rbm.nn.usage`, :mod:`rbm.nn.evaluation`.
"""
