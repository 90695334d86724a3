"""A suffix automaton that grows token by token and counts how often each context occurred.

Blumer et al. 1985 ("The smallest automaton recognizing the subwords of a text"). A state stands for all contexts that
end at the same places of the text. A state's link leads to the longest shorter context that ends at more places.
"""

_MAX_CLIMB = 24  # only of so many contexts does a token raise the counts, longest first
STATE_BYTES = 420  # of a state with its dictionaries, by sys.getsizeof; a token makes one or two states


class SuffixAutomaton:
    """All contexts of the tokens added so far.

    Attributes:
        next: By state, the state after each token that followed the context; state 0 is the empty context.
        link: By state, the state of the longest shorter context that ends at more places; -1 for the empty context.
        length: By state, tokens of its longest context.
        count: By state, how often its contexts occurred.
        last: The state of the whole text; its link is the longest context at the text's end that occurred before.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.last = 0

    def add(self, token: int) -> None:
        """Append a token to the text."""
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
        self.last = state = new
        for _ in range(_MAX_CLIMB):  # the contexts of the new state and of its links occurred once more
            if state <= 0:
                return
            self.count[state] += 1
            state = links[state]

    def _split(self, state: int, token: int, target: int) -> int:
        """Return a new state for the contexts of `target` that are no longer than `state` and the token after it."""
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

    def memory_bytes(self) -> int:
        """Return about how much memory the automaton takes."""
        return len(self.next) * STATE_BYTES
