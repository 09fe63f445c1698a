# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens and judging trees. Imports nothing of specla but errors, request and topology."""
