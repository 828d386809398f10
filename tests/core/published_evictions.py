"""Published cache algorithms on entries of one size, written from their papers with lists and dictionaries.

`serve` returns whether an entry is stored, and stores it otherwise.
"""

from collections import OrderedDict, deque

from .factories import KV


class Slru:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.max_protected = capacity, int(0.8 * capacity)
        self.probation, self.protected = OrderedDict(), OrderedDict()

    def serve(self, key: int) -> bool:
        hit = key in self.probation or key in self.protected
        if hit:
            self.probation.pop(key, None)
            self.protected[key] = None
            self.protected.move_to_end(key)
            if len(self.protected) > self.max_protected:
                self.probation[self.protected.popitem(last=False)[0]] = None
            return True
        if len(self.probation) + len(self.protected) == self.capacity:
            (self.probation or self.protected).popitem(last=False)
        self.probation[key] = None
        return False


class Sieve:
    """As in the paper: a new entry joins at the head; the hand moves from the tail to the head."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.queue, self.hand = capacity, [], None  # queue[0] is the head
        self.visited = {}

    def serve(self, key: int) -> bool:
        if key in self.visited:
            self.visited[key] = True
            return True
        if len(self.queue) == self.capacity:
            position = len(self.queue) - 1 if self.hand is None else self.queue.index(self.hand)
            while self.visited[self.queue[position]]:
                self.visited[self.queue[position]] = False
                position = position - 1 if position else len(self.queue) - 1
            self.hand = self.queue[position - 1] if position else None
            del self.visited[self.queue.pop(position)]
        self.queue.insert(0, key)
        self.visited[key] = False
        return False


class S3Fifo:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.share = capacity, 0.1 * capacity
        self.small, self.main, self.ghost, self.uses = deque(), deque(), deque(), {}

    def serve(self, key: int) -> bool:
        if key in self.uses:
            self.uses[key] = min(3, self.uses[key] + 1)
            return True
        if len(self.uses) == self.capacity:
            self.evict()
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.uses[key] = 0
        return False

    def evict(self) -> None:
        while True:
            if self.small and (len(self.small) >= self.share or not self.main):
                key = self.small.popleft()
                if self.uses[key] > 1:
                    self.main.append(key)
                    continue
                self.ghost.append(key)
                if len(self.ghost) > self.capacity - self.share:
                    self.ghost.popleft()
            else:
                key = self.main.popleft()
                if self.uses[key]:
                    self.uses[key] -= 1
                    self.main.append(key)
                    continue
            del self.uses[key]
            return


class Arc:
    """Figure 4 of the paper case by case; the target moves after REPLACE, and equality evicts from T2."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def replace(self) -> None:
        source, ghost = (self.t1, self.b1) if self.t1 and len(self.t1) > self.p else (self.t2, self.b2)
        if not source:
            source, ghost = self.t1, self.b1
        ghost[source.popitem(last=False)[0]] = None

    def full(self) -> bool:
        return len(self.t1) + len(self.t2) == self.c

    def serve(self, key: int) -> bool:
        if key in self.t1 or key in self.t2:
            self.t1.pop(key, None)
            self.t2[key] = None
            self.t2.move_to_end(key)
            return True
        if key in self.b1 or key in self.b2:
            self.again(key)
        else:
            self.new(key)
        return False

    def again(self, key: int) -> None:
        if self.full():
            self.replace()
        if key in self.b1:
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
        else:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
        self.b1.pop(key, None)
        self.b2.pop(key, None)
        self.t2[key] = None

    def new(self, key: int) -> None:
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                if self.full():
                    self.replace()
            else:
                self.t1.popitem(last=False)
        elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= self.c:
            if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.c:
                self.b2.popitem(last=False)
            if self.full():
                self.replace()
        self.t1[key] = None


class Gdsf:
    """Entries of one size and cost: the value is the clock plus the uses."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock, self.value, self.uses, self.stored = capacity, 0.0, {}, {}, {}
        self.saving, self.count = 1 / KV, 0

    def serve(self, key: int) -> bool:
        hit = key in self.value
        if not hit and len(self.value) == self.capacity:
            victim = min(self.value, key=lambda entry: (self.value[entry], self.stored[entry]))
            self.clock = self.value.pop(victim)
            del self.uses[victim]
        if not hit:
            self.count += 1
            self.stored[key] = self.count
        self.uses[key] = self.uses.get(key, 0) + 1
        self.value[key] = self.clock + self.uses[key] * self.saving
        return hit
