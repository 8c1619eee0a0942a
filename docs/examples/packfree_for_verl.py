"""verl imports this in each worker before it builds the model:
actor_rollout_ref.model.external_lib=packfree_for_verl
"""

from hf_packfree import register_patches

registration = register_patches()
