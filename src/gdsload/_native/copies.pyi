from collections.abc import Iterable
from typing import final

@final
class Copier:
    def __new__(cls, threads: int) -> Copier: ...
    def copy(
        self, copies: Iterable[tuple[int, int, int, bool]], region: object | None = None
    ) -> tuple[int, int]: ...
