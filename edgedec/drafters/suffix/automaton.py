"""A suffix automaton that grows token by token and counts how often each context occurred.

Blumer et al. 1985 ("The smallest automaton recognizing the subwords of a text"). A state stands for all contexts that
end at the same places of the text; its link leads to the longest shorter context that also occurs elsewhere.
"""

_MAX_CLIMB = 24  # contexts whose count a token raises, longest first
STATE_BYTES = 420  # of a state and its share of dictionaries, as sys.getsizeof adds up; a token makes one or two


class SuffixAutomaton:
    """Contexts of all that was added so far.

    The state 0 is the empty context. `last` is the whole text; its link is the longest context at the text's end that
    occurred before.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.last = 0

    def add(self, token: int) -> None:
        """Append a token."""
        transitions, links, lengths = self.next, self.link, self.length
        new = len(transitions)
        transitions.append({})
        links.append(0)
        lengths.append(lengths[self.last] + 1)
        self.count.append(0)
        state = self.last
        while state >= 0 and token not in transitions[state]:
            transitions[state][token] = new
            state = links[state]
        if state >= 0:
            target = transitions[state][token]
            links[new] = target if lengths[target] == lengths[state] + 1 else self._split(state, token, target)
        self.last = new
        self._count(new)

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the contexts of `target` that are at most as long as `state` and the token a state of their own."""
        clone = len(self.next)
        self.next.append(dict(self.next[target]))
        self.link.append(self.link[target])
        self.length.append(self.length[state] + 1)
        self.count.append(self.count[target])
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[target] = clone
        return clone

    def _count(self, state: int) -> None:
        for _ in range(_MAX_CLIMB):
            if state <= 0:
                return
            self.count[state] += 1
            state = self.link[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest known context that ends with that context of `length` tokens and the token."""
        while state >= 0:
            target = self.next[state].get(token)
            if target is not None:
                return target, length + 1
            state = self.link[state]
            length = self.length[state] if state >= 0 else 0
        return 0, 0

    def memory_bytes(self) -> int:
        """Return about how much memory it holds."""
        return len(self.next) * STATE_BYTES
