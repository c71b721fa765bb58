from typing import final

FORMATS: dict[str, tuple[int, int]]

@final
class Comparison:
    def __new__(
        cls, one: int, other: int, nbytes: int, dtype: str, widens: bool = False
    ) -> Comparison: ...
    def work(self, threads: int = 1) -> None: ...
    @property
    def equal(self) -> bool: ...
