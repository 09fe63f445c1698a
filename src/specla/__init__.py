# SPDX-License-Identifier: Apache-2.0
"""Lossless speculative decoding for linear-attention language models."""

__version__ = "0.1.0"
