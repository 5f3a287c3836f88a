# SPDX-License-Identifier: Apache-2.0
"""The paper's studies, rerun: what the scripts ``scripts/study_*.py`` have in common and measure."""
