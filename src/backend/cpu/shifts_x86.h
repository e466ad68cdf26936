/* Shifts by an amount that becomes a constant only after inlining: the intrinsics
 * need an immediate. Each x86 level writes `switch (n) { SHIFT_CASES(intrinsic) }`
 * for a vector named `v`. */
#ifndef SO_BACKEND_CPU_SHIFTS_X86_H
#define SO_BACKEND_CPU_SHIFTS_X86_H

#define SHIFT_CASE(n, op) \
    case n:               \
        return op(v, n);
#define SHIFT_CASES(op) \
    SHIFT_CASE(1, op)   \
    SHIFT_CASE(2, op)   \
    SHIFT_CASE(3, op)   \
    SHIFT_CASE(4, op) SHIFT_CASE(5, op) SHIFT_CASE(6, op) SHIFT_CASE(7, op) default : return v;

#endif
