// Search trees of rows in memory that may be shared.
//
// The shape of a tree follows from which rows are in it, as the priority of a node is a hash of its row (Seidel and Aragon, "Randomized
// search trees", 1996). A row is in one tree at most.
#pragma once

#include <cstdint>

#include "check.h"
#include "random.h"

namespace engram {

/// Stores of trees have fewer rows.
constexpr std::uint64_t kMostTreeRows = (std::uint64_t{1} << 32) - 1;

/// `Of`, which derives from this, has the nodes: `node(Id)` with `left` and `right`; `precedes(Id, Id)`, the order; `resize(Id)`, called
/// when the branches of a node have changed; and kTree, the message about a damaged one.
template <class Of>
class RowTrees {
 public:
  using Id = std::uint32_t;  // of a row: its number + 1; 0 is none

  static constexpr unsigned kMostDepth = 1024;  // of 2^32 rows it is about 80

  /// With a row that is a tree by itself.
  Id with(Id tree, Id row) const {
    Id below, above;
    split(tree, row, below, above);
    return merge(merge(below, row), above);
  }

  Id without(Id tree, Id row, unsigned depth = 0) const {
    intact(tree != 0 && depth < kMostDepth, Of::kTree);
    auto& root = of().node(tree);
    if (tree == row) return merge(root.left, root.right);
    Id& branch = of().precedes(row, tree) ? root.left : root.right;
    branch = without(branch, row, depth + 1);
    of().resize(tree);
    return tree;
  }

 private:
  const Of& of() const { return static_cast<const Of&>(*this); }

  Id merge(Id a, Id b, unsigned depth = 0) const {
    if (a == 0 || b == 0) return a + b;
    intact(depth < kMostDepth, Of::kTree);
    const bool first = mix(a) > mix(b);
    auto& root = of().node(first ? a : b);
    Id& branch = first ? root.right : root.left;
    branch = first ? merge(branch, b, depth + 1) : merge(a, branch, depth + 1);
    of().resize(first ? a : b);
    return first ? a : b;
  }

  // `below`: the rows that precede this one, which is not in the tree.
  void split(Id tree, Id row, Id& below, Id& above, unsigned depth = 0) const {
    if (tree == 0) {
      below = above = 0;
      return;
    }
    intact(depth < kMostDepth, Of::kTree);
    auto& root = of().node(tree);
    if (of().precedes(tree, row)) {
      split(root.right, row, root.right, above, depth + 1);
      below = tree;
    } else {
      split(root.left, row, below, root.left, depth + 1);
      above = tree;
    }
    of().resize(tree);
  }
};

}  // namespace engram
