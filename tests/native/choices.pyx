# cython: language_level=3
"""The choice of pages (`page_choice.pxd`), step by step. The test compiles it."""

from libc.string cimport memset

from gdsload._native.page_choice cimport AUTO, BOUNCE, HUGE, PageChoice, choose_huge, unit_took


cdef class Choice:
    """A choice of which nothing is known yet."""

    cdef PageChoice choice

    def __cinit__(self, mode="auto"):
        memset(&self.choice, 0, sizeof(self.choice))
        self.choice.mode = {"auto": AUTO, "huge": HUGE, "bounce": BOUNCE}[mode]

    def choose(self, int units):
        """Whether huge pages are for the next units."""
        return bool(choose_huge(&self.choice, units))

    def took(self, bint huge, int microseconds):
        """Adds what a unit took."""
        unit_took(&self.choice, huge, microseconds * 1000)
