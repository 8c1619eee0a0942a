"""verl imports this in each worker before it builds the model:
actor_rollout_ref.model.external_lib=packfree_for_verl
"""

from hf_packfree import register_patches

# logits as tensors, since verl compiles its entropy; log-probabilities of fused kernels stay ours
registration = register_patches(backend={"loss": "upstream"})
