"""Rules that reduce several vectors, some of which may be lies, to one: numpy, no clock, no randomness.

Each takes `vectors` [members, values], their `weights` [members], and `f`, the number of liars it must
survive. It returns one vector of the same type, or raises ValueError if the group is too small for that `f`.
A vector with a value that is not finite is treated as a lie: it is left out, and counts as one of the `f`.
The order of members does not affect the bytes of a result.

| module | rule | `f` of n members | liars can move it |
|---|---|---|---|
| mean | weighted mean | 0 | anywhere |
| median | coordinate-wise median | n > 2 f | each value within the honest range |
| trimmed_mean | the mean without the f largest and smallest | n > 2 f | each value within the honest range |
| centered_clipping | steps from a centre, clipped | n > 2 f | 7 times the largest honest distance from it |
| geometric_median | the least sum of distances (RFA) | n > 2 f | 2 (n - f) / (n - 2 f) honest radii |
| krum | the vector nearest to its neighbours; the mean of several | n > 2 f + 2 | to one of the vectors |
| nearest_neighbours | means of near vectors, as input of another rule | n > 2 f | as in that rule |

`gossip.averaging.aggregates` defines how the members of an attempt apply them.
"""
