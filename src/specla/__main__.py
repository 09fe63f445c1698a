# SPDX-License-Identifier: Apache-2.0
"""`python -m specla` is the `specla` command."""

from specla.cli import main

raise SystemExit(main())
