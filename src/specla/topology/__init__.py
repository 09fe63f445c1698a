# SPDX-License-Identifier: Apache-2.0
"""Trees of drafts and their schedules. Integers only; imports nothing but errors."""
