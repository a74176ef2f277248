"""Rules that reduce several vectors, some of which may be lies, to one: numpy, no clock, no randomness.

Each takes `vectors` [members, numbers], their `weights` [members], and `f`, how many liars it is to survive;
it returns one vector of the same type, or raises ValueError where the group is too small for that `f`. A
vector with a number that is not finite is a liar's: it is left out, and counts as one of the `f`. The order
of members changes no byte of a result.

| module | rule | `f` of n members | liars can move it |
|---|---|---|---|
| mean | weighted mean | 0 | anywhere |
| median | coordinate-wise median | n > 2 f | each number within the honest range |
| trimmed_mean | the mean without the f largest and smallest | n > 2 f | each number within the honest range |
| centered_clipping | steps from a centre, clipped | n > 2 f | 7 times the farthest honest from it |
| geometric_median | the least sum of distances (RFA) | n > 2 f | 2 (n - f) / (n - 2 f) honest radii |
| krum | the vector nearest to its neighbours; the mean of such | n > 2 f + 2 | to one of the vectors |
| nearest_neighbours | means of near vectors, for another rule | n > 2 f | as that rule |

`gossip.averaging.aggregates` says how the members of an attempt apply them.
"""
