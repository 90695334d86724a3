// What all functions of the C interface share: checks of arguments, and exceptions turned into error codes.
#pragma once
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "forward/model.h"
#include "weights/tiles.h"

namespace edgedec {

// What ec_last_error() returns, in each thread. A function, as MinGW links no variable of a thread that headers define.
std::string &last_error();

// Return the code that `body` returns, EC_OK where it returns nothing, or the code of what it throws.
template <class Body>
int32_t guarded(Body body) {
  try {
    if constexpr (!std::is_void_v<decltype(body())>) return body();
    else return body(), EC_OK;
  } catch (const Invalid &error) {
    last_error() = error.what();
    return EC_INVALID;
  } catch (const std::bad_alloc &) {
    last_error() = "the system refused memory";
    return EC_NO_MEMORY;
  } catch (const Unreadable &error) {
    last_error() = error.what();
    return EC_UNREADABLE;
  } catch (const NotFinite &error) {
    last_error() = error.what();
    return EC_NOT_FINITE;
  } catch (const std::exception &error) {
    last_error() = error.what();
    return EC_INVALID;
  }
}

inline void check_tiles(int32_t type, int64_t n_rows, int64_t n_cols, uint64_t n_bytes) {
  const uint64_t expected = tile_bytes(type, n_rows, n_cols);
  require(expected != 0, "a matrix of this type or shape has no tiles");
  if (n_bytes != expected)
    throw Invalid("the tiles have " + std::to_string(n_bytes) + " bytes, expected " + std::to_string(expected));
}

}  // namespace edgedec
