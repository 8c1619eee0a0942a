"""Stand-in for mamba-ssm 2.3.2 as it is where nothing of it was compiled: importing the root
raises.
"""

import selective_scan_cuda

__version__ = "2.3.2.post1"
__all__ = ["selective_scan_cuda"]
