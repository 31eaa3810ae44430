// One of two types, by a condition.
#pragma once

namespace voltapile {

template <bool CONDITION, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

}  // namespace voltapile
