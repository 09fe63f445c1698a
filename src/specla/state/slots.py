# SPDX-License-Identifier: Apache-2.0
"""SlotPool: which slots are free. Slot 0 is padding and is never handed out."""

from __future__ import annotations

from specla.errors import CapacityExceeded


class SlotPool:
    """Slots 1 .. num_slots; the lowest free one is taken first, so that runs are repeatable."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = set(range(1, num_slots + 1))

    @property
    def num_free(self) -> int:
        """Slots that `acquire` can still hand out."""
        return len(self._free)

    def acquire(self) -> int:
        """Take the lowest free slot.

        Raises:
            CapacityExceeded: none is free.
        """
        if not self._free:
            raise CapacityExceeded(
                f"a free slot is needed, all {self.num_slots} are taken; "
                "release one or raise max_slots"
            )
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Releasing a free or unknown slot is our own bug."""
        assert 1 <= slot <= self.num_slots, f"slot {slot} is not in 1..{self.num_slots}"
        assert slot not in self._free, f"slot {slot} is already free"
        self._free.add(slot)

    def in_use(self, slot: int) -> bool:
        """Whether `slot` is handed out."""
        return 1 <= slot <= self.num_slots and slot not in self._free
