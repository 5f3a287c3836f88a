# SPDX-License-Identifier: Apache-2.0
"""The benchmark that everyone can rerun: MALA beside the dense kernels, on the same inputs, in one run, checked before it is timed.

``forward``, ``backward`` and ``decode`` measure one workload each and return a row for the JSON; ``timing`` says what a time is,
``baselines`` what MALA is compared with, ``gate`` what must be right first.
"""
