from typing import final

@final
class Populator:
    def __new__(
        cls,
        parts: list[tuple[object, int, int]],
        threads: int,
        most_ahead: int,
        huge_pages: bool,
    ) -> Populator: ...
    def handle(self) -> object: ...
    def stop(self) -> None: ...
    def counts(self) -> tuple[int, int, int]: ...
