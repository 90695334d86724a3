// What all functions of the C interface share: checks of arguments, and exceptions turned into error codes.
#pragma once
#include <new>
#include <stdexcept>
#include <string>

#include "forward/model.h"
#include "weights/tiles.h"

namespace edgedec {

inline thread_local std::string last_error;  // what ec_last_error() returns

template <class Body>
int32_t guarded(Body body) {
  try {
    return body();
  } catch (const Invalid &error) {
    last_error = error.what();
    return EC_INVALID;
  } catch (const std::bad_alloc &) {
    last_error = "the system refused memory";
    return EC_NO_MEMORY;
  } catch (const Unreadable &error) {
    last_error = error.what();
    return EC_UNREADABLE;
  } catch (const NotFinite &error) {
    last_error = error.what();
    return EC_NOT_FINITE;
  } catch (const std::exception &error) {
    last_error = error.what();
    return EC_INVALID;
  }
}

inline void require(bool holds, const char *message) {
  if (!holds) throw Invalid(message);
}

inline void check_tiles(int32_t type, int64_t n_rows, int64_t n_cols, uint64_t n_bytes) {
  const uint64_t expected = tile_bytes(type, n_rows, n_cols);
  require(expected != 0, "a matrix of this type or shape has no tiles");
  if (n_bytes != expected)
    throw Invalid("the tiles have " + std::to_string(n_bytes) + " bytes, expected " + std::to_string(expected));
}

}  // namespace edgedec
