// Evaluate the expressions of a ValidatingAdmissionPolicy on requests, as the API server does: match conditions
// first, then variables in their order, then validations. Reads {"policy": ..., "requests": [...]} on standard
// input and writes a list of verdicts: "skipped", "allowed", or the message of the validation that denied.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
)

type expression struct {
	Name       string `json:"name"`
	Expression string `json:"expression"`
	Message    string `json:"message"`
}

type input struct {
	Policy struct {
		Spec struct {
			MatchConditions []expression `json:"matchConditions"`
			Variables       []expression `json:"variables"`
			Validations     []expression `json:"validations"`
		} `json:"spec"`
	} `json:"policy"`
	Requests []map[string]any `json:"requests"`
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func compile(env *cel.Env, text string) cel.Program {
	ast, issues := env.Compile(text)
	must(issues.Err())
	program, err := env.Program(ast)
	must(err)
	return program
}

func main() {
	var given input
	must(json.NewDecoder(os.Stdin).Decode(&given))
	env, err := cel.NewEnv(
		cel.Variable("object", cel.DynType),
		cel.Variable("oldObject", cel.DynType),
		cel.Variable("request", cel.DynType),
		cel.Variable("variables", cel.MapType(cel.StringType, cel.DynType)),
	)
	must(err)
	spec := given.Policy.Spec
	verdicts := []string{}
	for _, request := range given.Requests {
		vars := map[string]any{}
		seen := map[string]any{
			"object": request["object"], "oldObject": request["oldObject"],
			"request": request["request"], "variables": vars,
		}
		evaluate := func(each expression) any {
			value, _, err := compile(env, each.Expression).Eval(seen)
			must(err)
			if value == types.NullValue {
				return nil
			}
			return value.Value()
		}
		verdict := "allowed"
		for _, each := range spec.MatchConditions {
			if evaluate(each) != true {
				verdict = "skipped"
			}
		}
		if verdict == "allowed" {
			for _, each := range spec.Variables {
				vars[each.Name] = evaluate(each)
			}
			for _, each := range spec.Validations {
				if evaluate(each) != true {
					verdict = each.Message
				}
			}
		}
		verdicts = append(verdicts, verdict)
	}
	must(json.NewEncoder(os.Stdout).Encode(verdicts))
}
