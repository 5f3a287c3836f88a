# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness with MALA: a launcher that registers and hands over, and RULER as its original draws and scores it."""
